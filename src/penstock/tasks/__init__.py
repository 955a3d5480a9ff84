"""Tasks: the processing before and after a network runs. One file or folder per task; `built_in.py` lists them."""
