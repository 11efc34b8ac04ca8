"""What the commands of tools/ measure, check and show: the parts that they share, each once. Not installed.

It may import megamoe; nothing in megamoe imports it (tests/unit/structure/test_layering.py).
"""
