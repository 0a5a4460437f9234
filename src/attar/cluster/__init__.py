"""Work on several workers: tasks with dependencies, and rows dealt to actors that keep a model loaded.

    tasks.py        tasks and what each needs of a machine; which task runs when, retries
    journal.py      what became of each task, a line each; written by the driver alone
    workers.py      the workers that the settings name; worker processes of this machine
    ray_workers.py  workers of a Ray cluster (``attar[cluster]``)
    rows.py         rows in batches to actors; results in a journal by hash
    settings.py     ``--on``, ``--jobs``, and what a task needs of a machine

Nothing here knows recipes or models: a task is the import path of a function and its arguments as JSON. A
function is written so that a second call with the same arguments changes nothing; a task is called at least
once, and has its effect exactly once.
"""
