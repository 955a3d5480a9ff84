"""Compares Penstock with other inference servers ("peers"), each in its own venv, under equal loads."""
