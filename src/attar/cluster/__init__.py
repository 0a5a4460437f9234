"""Work on several workers: tasks with dependencies, and rows dealt to actors that keep a model loaded.

    tasks.py        which task runs when, retries, the journal
    journal.py      what became of each task, a line each; written by the driver alone
    workers.py      worker processes of this machine
    ray_workers.py  workers of a Ray cluster (``attar[cluster]``)
    rows.py         rows in batches to actors; results in a journal by hash
    target.py       ``--on``, and what a task asks of a machine

Nothing here knows recipes or models: a task is the import path of a function and its arguments as JSON. A
function is written so that a second call with the same arguments changes nothing; a task is called at least
once, and has its effect exactly once.
"""
