"""TEXT: a scheduled program through a template, as the source of a kernel that people can read."""
