"""Published layouts of draft heads: their config and tensor names, and ours, both ways.

    content.py       a head apart from its modules, and what layouts have in common
    table.py         name of a layout, to its module

``checkpoint/draft_head.py`` recognizes the layout of a folder.

Each layout's file has ``encode``, from a head to config and tensors, and ``decode``, back. What a layout has
no field for is in its config under ``attar``, which other readers ignore: nothing is lost on the way.
"""
