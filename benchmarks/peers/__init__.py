"""Other people's tools, each in an environment of its own, measured by attar's own measure."""
