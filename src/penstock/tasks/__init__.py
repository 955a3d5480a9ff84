"""Tasks: the processing before and after a network. One file or folder per task; `built_in.py` lists them."""
