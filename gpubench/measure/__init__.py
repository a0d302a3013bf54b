"""The measurements and reports behind the commands.

They use ports and the model, print nothing and import no GPU library.
"""
