"""What every other package stands on: errors, randomness, registries. Imports no other package."""
