"""FROM PLAN TO TRAINER: the parts that a config names, the model in its form, and what joins them
to an engine.
"""
