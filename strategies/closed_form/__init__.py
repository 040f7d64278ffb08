"""Last layers in closed form: the server half."""
