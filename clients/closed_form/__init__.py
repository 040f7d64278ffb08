"""Methods that compute the last layer in closed form: the client half."""
