"""The ground every other room stands on: errors, randomness, registries. Imports no other room."""
