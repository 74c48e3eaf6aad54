def coming_from_page(): return "# Where is what I know\n"
