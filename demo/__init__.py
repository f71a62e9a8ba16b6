"""`make demo`: a small model trained twice on this machine, as it is and after `evenkeel.torch.fuse`.

data       what is learned: the project's own text, and made-up pictures
networks   the models: a GPT, a vision transformer, a conv net of group norms and SiLU
machine    what else this machine is doing
training   both runs in turns, with the same batches, and where the time of a step goes
norms      the norms alone, measured by `python -m evenkeel bench`
report     the page and the pictures in demo-report, made from what was found (page.html, page.css)
__main__   the command: options, what is on the screen, whether the losses agree
start      builds the library for this machine first; what make calls
"""
