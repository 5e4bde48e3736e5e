"""`headrace bench`: the same work under every plan, measured on this machine.

    from headrace.bench.finding import find_work

    work = find_work("translation", {"batch": 64})          # or "your_module:make_work"
    model, optimizer, loss, loader = work.make(device, seed=0)

A work is a function that returns model, optimizer, loss and loader (`work`); `finding` looks it up.
"""
