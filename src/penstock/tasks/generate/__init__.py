"""The generate task: converts prompts and parameters to generations, and the engine's progress to answers."""
