"""The experiments that the command line offers.

The packages form layers: ``commands`` is on top, then come ``demo``, ``tables``, ``figures``, ``bench`` and ``plan``,
then ``training``, then ``data`` and ``models``, and at the bottom ``common``.
"""
