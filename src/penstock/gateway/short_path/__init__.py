"""The short path of small HTTP inference requests; README.md says why, when, and how to switch it off."""
