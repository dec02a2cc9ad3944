"""The trainer and what it is made of; knows hosts only through their objective."""
