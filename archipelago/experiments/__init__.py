"""What an experiment is: its config and its round loop, new clients, and the choice of K."""
