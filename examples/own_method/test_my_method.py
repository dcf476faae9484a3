"""What a method's tests look like: a special case, an option that changes the numbers, and equal bits on Ray actors."""

import pytest

import archipelago as ar

SMALL = {
    "clients": 8,
    "clusters": 2,
    "rounds": 4,
    "data": {"name": "digits", "rotations": 2},
    "local": {"steps": 3},
}
HERE = {"fleet": {"backend": "in_process"}}


def run(tmp_path, name, **settings):
    found = ar.run(**{**SMALL, **HERE, **settings}, storage=tmp_path, name=name, quiet=True)
    return (found.path / "metrics.csv").read_bytes(), found.metrics


def test_sticky_without_margin_is_ifca(tmp_path):
    columns = ["micro_accuracy", "micro_loss", "cluster_sizes"]
    _, ifca = run(tmp_path, "ifca", method="ifca")
    _, sticky = run(tmp_path, "sticky", method="my_method.Sticky", sticky={"margin": 0.0})
    assert sticky[columns].equals(ifca[columns])


def test_sticky_margin_changes_the_numbers(tmp_path):
    loose, _ = run(tmp_path, "loose", method="my_method.Sticky", sticky={"margin": 0.0})
    tight, metrics = run(tmp_path, "tight", method="my_method.Sticky", sticky={"margin": 0.9})
    assert loose != tight and metrics["stayed"].sum() > 0


@pytest.mark.ray
def test_sticky_gives_the_same_bits_on_two_ray_actors(tmp_path):
    here, _ = run(tmp_path, "here", method="my_method.Sticky+cam")
    there, _ = run(tmp_path, "there", method="my_method.Sticky+cam", fleet={"actors": 2, "dashboard": False})
    assert here == there
