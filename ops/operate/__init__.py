"""The commands of whoever operates a fabric: up and down, see, turn off, take out."""
