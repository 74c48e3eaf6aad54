"""Published measurements to judge the planner by. `README.md` describes the files."""
