"""`headrace tune`: looks for the plan under which a work is trained fastest, on this machine.

    from headrace.bench.tune.tuning import Tuning, TuneSettings

    result = Tuning.create(TuneSettings(work="translation")).run()
    print(result.winner.name, result.sentences)

`candidates` says what may be tried, `search` what is tried next and what is dropped, `measuring`
runs a candidate, `journal` keeps what was measured, `report` puts it into a table and sentences.
"""
