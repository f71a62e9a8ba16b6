"""A fork after the import, and an exit while threads call.

TensorFlow's own threads do not survive a fork: after its first operator, a child can call none.
"""

from commands import program

FAULTS = """
import os, signal, threading, time
import numpy as np
import evenkeel.tensorflow as ek

x = np.random.default_rng(0).standard_normal((1024, 512), np.float32)

def work():
    return ek.layer_norm_custom(x).numpy().tobytes()

end, other = os.pipe()
if os.fork() == 0:
    signal.alarm(60)
    os.close(end)
    with os.fdopen(other, "wb") as pipe:
        pipe.write(work())
    os._exit(0)
os.close(other)
with os.fdopen(end, "rb") as pipe:
    assert pipe.read() == work()

def keep_calling():
    while True:
        work()

for _ in range(3):
    threading.Thread(target=keep_calling, daemon=True).start()
time.sleep(0.1)
"""


def test_a_fork_and_an_exit():
    program(FAULTS)
