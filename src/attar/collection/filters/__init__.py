"""The filters of collected text, one file each; the table is in ``run.py``, so that settings stay light."""
