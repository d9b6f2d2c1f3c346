"""The presets that ship with the package."""
