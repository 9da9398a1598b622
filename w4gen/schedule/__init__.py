"""HOW it is computed: pure functions from a program and an arch to a schedule, and from a schedule to a rewritten program."""
