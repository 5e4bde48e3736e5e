"""`headrace tune`: looks for the plan under which a work is trained fastest, on this machine.

    from headrace.bench import Tuning, TuneSettings

    result = Tuning.create(TuneSettings(work="translation")).run()
    print(result.winner.name, result.sentences)

`candidates` says what may be tried, `search` what is tried next and what is dropped, `measurer`
runs a candidate, `journal` keeps what was measured, `result` puts it into a table and sentences.
"""
