"""The documentation site: what of it is made from the code when it is built. `mkdocs.yml` names
`hook.py`.
"""
