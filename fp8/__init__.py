"""FP8: recipes, rounding, the Linears that multiply by them. README.md says in which order to read
it."""
