"""The generate task: turns prompts and parameters into generations, and the engine's progress into answers."""
