"""One answer: does a plan fit, how long is a step, and where does the time go."""

import meshwright as mw

model, cluster = mw.load_model("llama3-70b"), mw.load_cluster("64xh100")
train, plan = mw.parse_train("batch=512,seq=8192"), mw.parse_plan("tp8 pp4 vpp5 zero1")
answer = mw.predict(model, cluster, train, plan)

print(f"{answer.step_time_s:.1f} s a step, MFU {answer.mfu:.0%}, fits: {answer.fits}")
for cause, seconds in answer.attribution.items():
    print(f"  {cause:<12} {seconds:8.3f} s")
