"""Rooms of `dloop.regenerate`: the target answers the questions of a data set, and no row is lost or doubled."""
