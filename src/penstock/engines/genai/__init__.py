"""OpenVINO GenAI: text, generated for many requests at once, in a process of its own."""
