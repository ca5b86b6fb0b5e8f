"""The options of ``meshwright run``, and what each takes."""

from __future__ import annotations

import msgspec

from meshwright.cli import options

DESCRIPTION = """Train a plan for real with torch.distributed, and compare it with its prediction.

Name the plan.toml that meshwright search --save wrote, or say MODEL, --on, --train and --plan as to predict. One
process a rank is started on this machine (on the CPU with gloo, or a GPU each with NCCL); under torchrun or a scheduler
its processes are joined. With --link every rank has an emulated host of its own on this machine (meshwright emulate),
trains for real over links of that rate and delay, and is predicted for them. Ctrl-C or SIGTERM finishes the step, saves
a checkpoint in --out and ends with exit code 0. A model of a graph is trained on a file of edges, --data EDGES
(meshwright explain graph_model), a classifier of images or a diffusion transformer on labelled ones: FILE.npz with
images and labels, CIFAR's binary files or MNIST's. With --denoise in place of --train a diffusion transformer makes
images from --weights, and the images of a plan that does not wait are compared with those of one that does.

Exit code 0: trained, or ended on request; 1: a process died or the loss was not a number; 2: the question is wrong."""
DATA = "--data FILE, a text file, a .jsonl, a folder of them or the word sample; or labelled images, FILE.npz or digits"
STEPS = 20
#: The framework profile of what runs here, where neither the user nor the device names one.
OWN = "meshwright"
NEEDED = ("torch", "safetensors", "tokenizers")
#: Numbers among the options: field -> (least, most, whole numbers only, what is wanted in words).
NUMBERS = {
    "steps": (1, 1e12, True, "a number of steps, at least 1"),
    "save_every": (1, 1e12, True, "a number of steps"),
    "base_batch": (1, 1e9, True, "a number of sequences"),
    "warmup": (0, 1e12, True, "a number of steps"),
    "decay": (1, 1e12, True, "a number of steps"),
    "seed": (0, 2**63 - 1, True, "a whole number"),
    "lr": (0.0, 1e6, False, "a learning rate such as 3e-4"),
    "clip": (0.0, 1e12, False, "a norm, 0 for no clipping"),
    "min_lr": (0.0, 1.0, False, "a share of the learning rate, 0 to 1"),
    "weight_decay": (0.0, 1e3, False, "a rate such as 0.1"),
    "keep": (1, 1e9, True, "a number of checkpoints"),
    "data_workers": (0, 256, True, "a number of processes, up to 256"),
    "prefetch": (1, 4096, True, "a number of batches, up to 4,096"),
    "eval_every": (1, 1e12, True, "a number of steps"),
    "held_out": (1e-6, 0.5, False, "a share of the text, up to 0.5"),
}
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("fp32", "bf16", "fp8", "fp8_row", "float64")
SCALES = ("linear", "sqrt")
#: Share of the text that --eval-every measures the loss on where nobody says.
HELD_OUT = 0.01


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``meshwright run``."""

    plan_file: options.positional("FILE", "plan.toml or question.toml; or a MODEL as predict takes it.") = ""
    model: options.text("MODEL", "Catalog name or Hugging Face config.json, over the file's.") = ""
    on: options.text("CLUSTER", "What the plan is for: 64xh100, a catalog name or a .toml file.") = ""
    train: options.text("WORKLOAD", "batch=SEQUENCES,seq=TOKENS and more: meshwright explain workload.") = ""
    plan: options.text("PLAN", "Words such as 'tp2 dp2 zero1', or a .toml file: meshwright explain plan.") = ""
    denoise: options.text(
        "IMAGES", "Make images with --weights of a diffusion transformer in place of training: images=4,size=256."
    ) = ""
    framework: options.text("NAME", "Whose host and memory costs predict: meshwright catalog frameworks.") = ""
    data: options.text(
        "PATH",
        "Text to train on: a file, .jsonl, .parquet, .arrow, .bin, .ds, a folder, a=0.7,b=0.3; or .npz, digits.",
    ) = ""
    clusters: options.text(
        "FILE.npz", "What samples are clustered by under sync=ddm: features or clusters; or what a router learns."
    ) = ""
    lengths: options.text("FILE.csv", "Write the lengths of the text's documents, for a workload's lengths=.") = ""
    routing: options.text("FILE.json", "Write the choices of the model's routers, for a workload's routing=.") = ""
    variances: options.text(
        "FILE.json", "Measure how gradients vary with each operator in fewer bits, for a plan's lowered=."
    ) = ""
    tokenizer: options.text("FILE", "A Hugging Face tokenizer.json; that of --weights, else bytes, if left out.") = ""
    data_workers: options.text(
        "COUNT", "Processes beside each rank that make its batches ahead; 0, in the step's own, if left out."
    ) = ""
    prefetch: options.text("COUNT", "Batches that they make ahead of the step; 2 a worker if left out.") = ""
    steps: options.text("COUNT", "Steps in all; those of the workload's tokens, or 20, if left out.") = ""
    out: options.text("FOLDER", "Keep metrics.jsonl and checkpoints there.") = ""
    resume: options.switch("Go on from the newest checkpoint in --out, under this plan or another.") = False
    save_every: options.text("COUNT", "Steps between checkpoints; only one at the end if left out.") = ""
    weights: options.text("FOLDER", "Begin with published weights: safetensors, or torch.distributed.checkpoint's.") = (
        ""
    )
    adapter: options.text("FOLDER", "With phase=lora: go on from adapters that PEFT or a run wrote.") = ""
    export: options.text("KIND", "What adapters are written as in --out: adapter (PEFT's), merged or none.") = ""
    lr: options.text("RATE", "Learning rate; 3e-4 if left out.") = ""
    scale_lr: options.text("RULE", "The learning rate is of --base-batch; it grows with the batch: linear or sqrt.") = (
        ""
    )
    base_batch: options.text("COUNT", "Sequences of the batch that --lr is for, with --scale-lr.") = ""
    drives: options.text(
        "DIR", "Folder for state that offload= keeps on drives; that for temporary files if left out."
    ) = ""
    warmup: options.text("COUNT", "Steps over which the learning rate rises; none if left out.") = ""
    decay: options.text("COUNT", "Step at which it has come down to --min-lr of itself; constant if left out.") = ""
    schedule: options.text("WAY", "How it comes down: cosine, linear, or wsd (over the last tenth of the steps).") = ""
    min_lr: options.text("SHARE", "What is left of the learning rate at --decay; 0.1 if left out.") = ""
    weight_decay: options.text(
        "RATE", "Weight decay of matrices, decoupled in AdamW; 0.1 if left out, 0.0001 of classifiers, 0 of DiT."
    ) = ""
    betas: options.text("B1,B2", "Decay of the first and second moment; 0.9,0.95 if left out.") = ""
    keep: options.text("COUNT", "Newest checkpoints that are kept; 2 if left out.") = ""
    eval_every: options.text("COUNT", "Steps between measurements of the loss on data that are not trained on.") = ""
    held_out: options.text("SHARE", "With --eval-every: the share of the data that is held out; 0.01 if left out.") = ""
    eval_data: options.text(
        "PATH", "With --eval-every: labelled images to measure on, in place of a part held out."
    ) = ""
    augment: options.text("WAYS", "Change images as they are trained on: flip, crop=PIXELS, or flip+crop=4.") = ""
    clip: options.text("NORM", "Gradients longer than this are scaled down; 1 if left out.") = ""
    seed: options.text("NUMBER", "Of initial weights, data order and dropout; 0 if left out.") = ""
    dtype: options.text("TYPE", "Compute in fp32, bf16, fp8, fp8_row or float64 instead of the workload's type.") = ""
    tensorboard: options.text("FOLDER", "Write every step's numbers for TensorBoard there too.") = ""
    wandb: options.text("PROJECT", "Log every step's numbers to a project of Weights & Biases (WANDB_MODE).") = ""
    callback: options.text("MODULE:FUNCTION", "Call a function of yours after every step; True ends the run.") = ""
    device: options.text("KIND", "cpu or cuda; GPUs where there are some if left out.") = ""
    anyway: options.switch("Begin even where the prediction says that this machine's memory does not suffice.") = False
    link: options.text("RATE[,delay=TIME]", "A host for every rank, with such a link: 100mbit,delay=20ms.") = ""
    world: options.text(
        "FILE.csv", "Kill processes at the times of a trace, and recover: failures.csv,spares=1,repair=10s."
    ) = ""
    elastic: options.switch("Go on when any process is killed, from memory and on the ranks that are left.") = False
    trace: options.text("FILE", "Write the measured timeline of the last steps, step.json.gz.") = ""
    job_trace: options.text("FILE", "Write what the run met in --world, event by event, job.json.") = ""
    json: options.JSON = False
