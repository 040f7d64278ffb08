"""The sandwiched problem of DeepAFL against the same problem as one system in all of Omega."""

import pytest
import torch

from fedntk.ntk.convex.ridge import sandwiched_ridge


@pytest.mark.parametrize(("p", "num_classes"), [(5, 3), (3, 5)])
def test_omega_solves_the_normal_equations(p, num_classes):
    """vec(F Omega W) = (F kron W^T) vec(Omega), by rows; the condition number is below 1e4."""
    generator = torch.Generator().manual_seed(0)
    f, r, w = (
        torch.randn(*shape, generator=generator).double()
        for shape in ((20, 4), (20, num_classes), (p, num_classes))
    )
    rho = 0.1 * f.square().sum(1).mean() * w.square().sum(0).mean()
    system = torch.kron(f, w.T.contiguous())
    gram = system.T @ system + rho * torch.eye(4 * p).double()
    expected = torch.linalg.solve(gram, system.T @ r.flatten()).view(4, p)
    actual = sandwiched_ridge(f.T @ f, f.T @ r, w, 0.1, 20)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)
