"""Last layers in closed form: the client half."""
