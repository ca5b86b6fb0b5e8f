"""Several plans of one model on one cluster, the fastest that fits first."""

import meshwright as mw

PLANS = ("tp8 pp4 vpp5 zero1", "tp8 pp2 vpp5 zero1", "tp8 fsdp", "fsdp full", "tp4 pp4 vpp5 zero1 full")

model, cluster = mw.load_model("llama3-70b"), mw.load_cluster("64xh100")
train = mw.parse_train("batch=512,seq=8192")
answers = [mw.predict(model, cluster, train, mw.parse_plan(plan), detail=False) for plan in PLANS]

for answer in sorted(answers, key=lambda a: (not a.fits, a.step_time_s)):
    memory = answer.peak_memory_bytes / 2**30
    print(
        f"{answer.step_time_s:7.2f} s  MFU {answer.mfu:5.1%}  {memory:5.1f} GiB  fits {answer.fits!s:<5}  {answer.plan}"
    )
