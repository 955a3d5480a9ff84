"""The generate task: prompts and parameters become generations, what an engine makes of them becomes answers."""
