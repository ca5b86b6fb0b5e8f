"""Computations of a user's own: their notation, everything that is wrong with a file, and the derived backward."""

import textwrap
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.errors import MeshwrightError
from meshwright.layers.derivative import derived
from meshwright.spec.computation import said
from meshwright.spec.computation_file import load

EXAMPLES = Path(__file__).parents[2] / "examples"


def written(tmp_path, text):
    path = tmp_path / "own.toml"
    path.write_text(textwrap.dedent(text))
    return path


def faults(tmp_path, text):
    with pytest.raises(MeshwrightError) as error:
        load(written(tmp_path, text))
    assert all(d.code == "A004" and d.help for d in error.value.diagnostics)
    return [(d.message, d.place.partition("own.toml:")[2]) for d in error.value.diagnostics]


GOOD = """\
steps = '''
C[i,j] = A[i,k] * B[k,j]
loss = 1/i * C[i,j] * C[i,j]
'''
[dims]
i = 6
j = 5
k = 4
[inputs]
A = { keys = ["i", "k"], trained = true }
B = { keys = ["k", "j"] }
"""


def test_a_line_is_read_and_written_back():
    dims = {"i": 4, "k": 8}
    for text in (
        "C[i,j] = sum(k) A[i,k] * B[k,j]",
        "C[i,j] = 0.5 * A[i,k] * B[k,j]",
        "Y[i,j] = Z[i,j] - 2 * b[j] + c[i]",
        "S[i,j] = softmax(Z[i,j], j)",
        "H[i] = relu(Z[i])",
        "loss = 1/i/k * sum(i) A[i] * A[i]",
        "T[j,i] = A[i,j]",
    ):
        step = said(text, dims)
        assert step.output in "CYSHTloss"
    assert said("loss = 1/i/k * sum(i) A[i] * A[i]", dims).factors == (1 / 32,)
    assert said("Y[i,j] = Z[i,j] - 2 * b[j]", dims).factors == (1.0, -2.0)
    assert said("l = -1/i * A[i]", dims).factors == (-0.25,)


def test_all_that_is_wrong_with_a_file_is_said_at_once_with_its_line(tmp_path):
    found = faults(
        tmp_path,
        """\
        steps = '''
        C[i,j] = sum(i) A[i,k] * B[k,j]
        D[i,q] = A[i,k] * B[k,j]
        E[i,k] = A[i,k] + M[k,i]
        F[i,k] = swish(A[i,k])
        G[i,k] = A[i,k] + H[i,k]
        H[i,k] = relu(G[i,k])
        J[i,j] = nothing[i,k] * B[k,j]
        K[i] = softmax(A[i,k], j)
        loss = C[i,j]
        loss[i] = relu(C[i,j])
        N[i,k] = (A[i,k])
        A[i,k] = B[k,j]
        '''
        dtype = "fp31"
        rate = 0
        rat = 1
        [dims]
        i = 6
        j = 5
        k = 0
        m = 7
        [inputs]
        A = { keys = ["i", "k"], trainde = true }
        B = { keys = ["k", "j"] }
        M = { keys = ["m", "i"] }
        O = { keys = ["i", "i"], nonzeros = 900 }
        """,
    )
    for part, place in (
        ("unknown key 'rat'", "17: rat"),
        ("dtype = 'fp31' is not known", "15: dtype"),
        ("rate = 0 is no number above 0", "16: rate"),
        ("k = 0 is no whole number", "21: dims.k"),
        ("unknown key 'trainde'", "24: inputs.A"),
        ("no input is trained", "23: [inputs]"),
        ("'i' is a key twice", "27: inputs.O"),
        ("nonzeros = 900 is no whole number from 1 to the 6 places", "27: inputs.O"),
        ("no step reads O", "27: inputs.O"),
        ("'i' is summed and nothing", ""),
        ("unknown dim 'q'", "3: D = ..."),
        ("sizes do not match: k is 1 long and M's m 7", "4: E = ..."),
        ("unknown function 'swish'", "5: F[i,k] = swish(A[i,k])"),
        ("a cycle", "6: G"),
        ("nothing makes 'nothing'", "8: J = ..."),
        ("'j' is none of its", "9: K = ..."),
        ("softmax leaves keys as they are", "9: K = ..."),
        ("loss is made in line 10 already", "11: loss[i] = relu(C[i,j])"),
        ("'(' is no name", "12: N[i,k] = (A[i,k])"),
        ("A is an input already", "13: A[i,k] = B[k,j]"),
        ("no step reads D", "3: D = ..."),
    ):
        if place:
            assert any(part in message and place == where for message, where in found), (part, place, found)
    assert ("'i' is summed and a key of the result", "2: C = ...") in found


@pytest.mark.parametrize(
    ("old", "new", "part", "line"),
    [
        ("loss = 1/i * C[i,j] * C[i,j]", "loss[i] = C[i,j] * C[i,j]", "the loss is no single number", 3),
        ("loss = 1/i * C[i,j] * C[i,j]", "lost = C[i,j] * C[i,j]", "no step makes the loss", 1),
        ("loss = 1/i * C[i,j] * C[i,j]", "loss = sum(i) C[i,j] * C[i,j]", "'j' is in no result", 3),
        ("A[i,k] * B[k,j]", "A[i,k,j] * B[k,j]", "read by 3 keys and has 2", 2),
        ("A[i,k] * B[k,j]", "B[k,j]", "'i' is a key of the result and of nothing", 2),
        ("C[i,j] = A[i,k] * B[k,j]", "C[i,j] = A[i,k] * B[k,j] + A[i,k]", "products are added up in one step", 2),
        ("C[i,j] = A[i,k] * B[k,j]", "C[i,j] = A[i,k] * relu(B[k,j])", "relu is part of a larger step", 2),
        ("C[i,j] = A[i,k] * B[k,j]", "C[i,j] = A[i,k] * B[k,j] ; x", "';' cannot be read", 2),
        ("C[i,j] = A[i,k] * B[k,j]", "C[i,j] = present(A[i,k])", "present is of a sparse relation", 2),
        ("trained = true", "trained = true, nonzeros = 3", "", 0),
        ('B = { keys = ["k", "j"] }', "B = { keys = [], nonzeros = 1 }", "nonzeros is of a tensor with keys", 11),
        ("[dims]", "format_version = 2\n[dims]", "format_version is 2, this version reads 1", 5),
        ("loss = 1/i * C", "loss = 1/q * C", "divided by 'q'", 3),
        ("loss = 1/i * C", "loss = 1/0 * C", "divided by 0", 3),
        ("loss = 1/i * C", "loss = 1e999 * C", "too large", 3),
        ("[inputs]", "[joins]\nC = 3\n[inputs]", "C = 3 names no key", 10),
        ("[inputs]", "[mesh]\nx = true\n[inputs]", "x = True is no whole number", 10),
    ],
)
def test_each_fault_says_its_line_its_cause_and_a_way_out(tmp_path, old, new, part, line):
    text = GOOD.replace(old, new)
    assert text != GOOD
    if not part:
        assert load(written(tmp_path, text)).tensors["C"].rows_of == ""
        return
    found = faults(tmp_path, text)
    assert any(part in message and where.startswith(f"{line}: ") for message, where in found), found


@pytest.mark.parametrize(
    ("step", "part"),
    [
        ("C[u,v] = R[u,v] + D[u,v]", "D is dense and added to the rows of a sparse relation"),
        ("C[u,v] = R[u,v] * D[u,v]", "D is dense over all keys of a sparse relation"),
        ("C[u,v] = softmax(R[u,v], v)", "softmax of a sparse relation is not read"),
        ("C[v,u] = R[u,v] * W[u]", "a sparse result has the keys of its relation"),
        ("C[u,v] = R[u,v] * S[u,v]", "have other rows"),
        ("C[u,g] = R[u,v] * X[v,f] * Q[f,g]", "a product of matrices"),
        ("C[u] = X[u,f] * Q[f,g] * W[u]", "3 dense tensors are joined"),
    ],
)
def test_what_sparse_relations_cannot_do_is_said(tmp_path, step, part):
    found = faults(
        tmp_path,
        f"""\
        steps = '''
        {step}
        '''
        [dims]
        u = 6
        v = 6
        f = 2
        g = 2
        [inputs]
        R = {{ keys = ["u", "v"], nonzeros = 9 }}
        S = {{ keys = ["u", "v"], nonzeros = 9 }}
        D = {{ keys = ["u", "v"], trained = true }}
        X = {{ keys = ["v", "f"] }}
        Q = {{ keys = ["f", "g"] }}
        W = {{ keys = ["u"] }}
        """,
    )
    assert any(part in message and where.startswith("2: ") for message, where in found), found


def test_files_that_hold_no_computation_are_refused_at_once(tmp_path):
    """Bytes that are no text, tables nested without end, and megabytes of steps, of one line or of inputs."""
    path = tmp_path / "own.toml"
    shape = "[dims]\nu = 3\n[inputs]\nA0 = { keys = ['u'], trained = true }\n"
    lines = "\n".join(f"A{i}[u] = relu(A{i - 1}[u])" for i in range(1, 20_000))
    inputs = "".join(f"A{i} = 1\n" for i in range(1, 20_000))
    line = " * ".join(["A0[u]"] * 100_000)
    for text, part in (
        (b"\xbd\x00", "cannot be read: 'utf-8' codec"),
        (b"a = " + b"[" * 100_000, "nested too deeply"),
        (f"steps = '''\n{lines}\n'''\n{shape}".encode(), "19999 steps are too many"),
        (f"steps = '''\nloss = {line}\n'''\n{shape}".encode(), "100000 dense tensors"),
        (f"steps = 'loss = A0[u]'\n{shape}{inputs}".encode(), "A19999 = 1 is no table"),
    ):
        path.write_bytes(text)
        with pytest.raises(MeshwrightError) as error:
            load(path)
        assert any(part in d.message for d in error.value.diagnostics), part


def test_faults_are_said_in_the_order_of_the_file(tmp_path):
    more = "".join(f'T{i} = {{ keys = ["i"] }}\n' for i in range(9))
    assert faults(tmp_path, GOOD + more) == [(f"no step reads T{i}", f"{12 + i}: inputs.T{i}") for i in range(9)]


def test_a_weight_that_no_gradient_reaches_is_refused(tmp_path):
    text = GOOD.replace('B = { keys = ["k", "j"] }', 'B = { keys = ["k", "j"], nonzeros = 7, trained = true }')
    text = text.replace("C[i,j] = A[i,k] * B[k,j]", "O[k,j] = present(B[k,j])\nC[i,j] = A[i,k] * O[k,j]")
    assert any("does not depend on the values of B" in message for message, _ in faults(tmp_path, text))


def test_the_backward_of_a_product_is_two_products(tmp_path):
    """dA = dC B^T, and nothing for B, which is not trained; of C twice in the loss a term each."""
    lines = [step.text for step in derived(load(written(tmp_path, GOOD))).steps]
    assert lines[2:] == [
        "d(C).1[i,j] = 0.166667 * C[i,j]",
        "d(C).2[i,j] = 0.166667 * C[i,j]",
        "d(C)[i,j] = d(C).1[i,j] + d(C).2[i,j]",
        "d(A)[i,k] = sum(j) d(C)[i,j] * B[k,j]",
        "A updated[i,k] = A[i,k] - 0.1 * d(A)[i,k]",
    ]


def test_of_a_graphs_edges_gradients_go_back_along_the_same_rows():
    made = derived(load(EXAMPLES / "gcn.toml"))
    lines = {step.output: step.text for step in made.steps}
    assert lines["d(XW)"] == "d(XW)[src,wide] = sum(dst) d(Z1)[dst,wide] * A[dst,src]"
    assert lines["d(W1)"] == "d(W1)[feature,wide] = sum(src) d(XW)[src,wide] * X[src,feature]"


def test_the_command_refuses_what_is_of_models_and_says_all_faults(tmp_path, capsys):
    path = str(written(tmp_path, GOOD.replace("B[k,j]", "Z[k,j]")))
    assert main(["place", path, "--on", "8xh1000", "--train", "batch=1,seq=2"]) == 2
    text = capsys.readouterr().err
    assert "--train is of a model" in text and "nothing makes 'Z'" in text and "8xh1000" in text
    assert main(["place", str(tmp_path / "none.toml"), "--on", "8xh100"]) == 2
    assert main(["place", str(tmp_path / "none.toml")]) == 2
    assert main(["place", "llama3-8b", "--backward"]) == 2
    good = str(written(tmp_path, GOOD.replace("[dims]", "[mesh]\nx = 3\n[dims]")))
    assert main(["place", good, "--on", "8xh100"]) == 2
    assert "x 3 = 3 ranks, and the cluster 8" in capsys.readouterr().err
