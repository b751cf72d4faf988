import pytest, sys
@pytest.fixture
def mine(comm): return comm.size
def test_fail(mine, comm): print("hello"); print("err", file=sys.stderr); assert comm.rank==1
@pytest.mark.xfail(strict=True)
def test_x(comm): assert 0
@pytest.mark.skip("no")
def test_s(comm): assert 0
def test_s2(comm): pytest.skip("inner")
@pytest.mark.ranks(2)
def test_2(comm): assert comm.size==2
