"""RUN: weights, the op, launches and checks, with torch."""
