"""`headrace tune`: finds the plan that trains a workload fastest on this machine.

    from headrace.bench import Tuning, TuneSettings

    result = Tuning.create(TuneSettings(work="translation")).run()
    print(result.plan.name, result.sentences)

`candidates` says what may be tried, `search` decides what to try next and what to drop, `measurer`
runs a candidate, `result` makes a table, sentences and a plan.
"""
