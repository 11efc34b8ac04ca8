"""tools/placement.py: under skewed routing, a placement takes routes off the fullest rank."""

from programs import passes


def test_a_placement_evens_the_ranks_out():
    options = "--backend staged --ranks 2 --cpu --shape tiny --tokens 64 --slots 2 --samples 1"
    lines = passes("placement.py", *options.split()).splitlines()[-4:]
    fullest = {tuple(line.split(",")[4:6]): float(line.split(",")[7]) for line in lines}
    assert fullest["skewed", "with"] < fullest["skewed", "without"]
    assert len(fullest) == 4
