"""WHAT is computed: values only. Nothing here imports torch, jinja or triton."""
