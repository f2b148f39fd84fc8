"""What adapters of several engines have in common. Importing it loads no engine."""
