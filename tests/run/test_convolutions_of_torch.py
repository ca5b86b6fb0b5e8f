"""Operations and saved bytes of convolutions against torch's counter of operations and what its autograd keeps."""

import pytest

import meshwright as mw
from meshwright.layers.convolution import FeatureMaps, convolved, path_pieces
from meshwright.lower import lower
from meshwright.spec.convolution import Convolution2d, ConvolutionPath

torch = pytest.importorskip("torch")

IMAGES = 4
STAGES = lower(
    mw.parse_plan(f"dp8 mb{IMAGES}").on(8),
    mw.load_model("resnet-50"),
    mw.load_cluster("8xv100"),
    mw.parse_train("batch=32,image=224,dtype=fp16"),
).stages
CONTEXT = STAGES.context()


def flops(spec, side, backward):
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.empty(IMAGES, spec.inputs, side, side, device="meta", requires_grad=True)
    one = torch.nn.Conv2d(
        spec.inputs, spec.outputs, spec.kernel, spec.stride, spec.kernel // 2, groups=spec.groups, device="meta"
    )
    counter = FlopCounterMode(display=False)
    with counter:
        y = one(x)
        if backward:
            y.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("kernel", "stride", "groups"), [(1, 1, 1), (3, 1, 1), (3, 2, 1), (1, 2, 1), (7, 2, 1), (3, 1, 4)]
)
def test_the_three_products_have_the_operations_that_torch_counts(kernel, stride, groups):
    spec = Convolution2d(inputs=32, outputs=64, kernel=kernel, stride=stride, groups=groups)
    piece = convolved(CONTEXT, "one", spec, FeatureMaps(IMAGES, 28, 28))
    assert piece.forward.flops == flops(spec, 28, False)
    # the taps of a stride divide into products of whole numbers of them, up to one more
    assert piece.backward.flops + piece.weight.flops == pytest.approx(2 * piece.forward.flops, rel=0.02)
    if groups == 1:  # of groups its counter takes the gradients' products as if all channels met
        assert flops(spec, 28, True) == 3 * flops(spec, 28, False)


def saved_bytes(module, x):
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = module(x)
    own = {p.untyped_storage()._cdata for p in (*module.parameters(), *module.buffers())}
    return y, {key: size for key, size in kept.items() if key not in own}


class Bottleneck(torch.nn.Module):
    """A bottleneck of torchvision's kind, with a shortcut."""

    def __init__(self, path):
        super().__init__()
        first, second, third = path.convolutions
        made = [self._of(one) for one in (first, second, third, path.shortcut)]
        self.convolutions = torch.nn.ModuleList(one for one, _ in made)
        self.norms = torch.nn.ModuleList(norm for _, norm in made)
        self.relu = torch.nn.ReLU(inplace=True)

    @staticmethod
    def _of(spec):
        half = {"device": "meta", "dtype": torch.float16}
        one = torch.nn.Conv2d(spec.inputs, spec.outputs, spec.kernel, spec.stride, spec.kernel // 2, bias=False, **half)
        return one, torch.nn.BatchNorm2d(spec.outputs, **half)

    def forward(self, x):
        y = self.relu(self.norms[0](self.convolutions[0](x)))
        y = self.relu(self.norms[1](self.convolutions[1](y)))
        y = self.norms[2](self.convolutions[2](y))
        y += self.norms[3](self.convolutions[3](x))
        return self.relu(y)


def test_a_bottleneck_keeps_what_torch_keeps():
    path = next(
        part
        for block in STAGES.model.blocks
        for part in block.before
        if isinstance(part, ConvolutionPath) and part.shortcut is not None and part.convolutions[1].stride == 2
    )
    c = CONTEXT.at(path.stream)
    side = round(c.seq_len**0.5)
    x = torch.empty(IMAGES, path.convolutions[0].inputs, side, side, device="meta", dtype=torch.float16)
    y, kept = saved_bytes(Bottleneck(path), x.requires_grad_())
    # the sum's ReLU keeps its result, which the next block's first convolution is charged with here; means and
    # deviations of norms are small
    ours = sum(piece.saved for piece in path_pieces(c, path)) + y.numel() * 2
    assert sum(kept.values()) == pytest.approx(ours, rel=0.01)
