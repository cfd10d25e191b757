"""The commands, one module each. A module imports what takes long to import only when its command runs."""
