"""What plans run on. In walking order: `topology`, `device_profile` (measured), `presets`, `machines` (published)."""
