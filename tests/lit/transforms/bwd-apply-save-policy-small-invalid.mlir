// RUN: retrograd-opt %s --verify-diagnostics -p 'bwd-apply-save-policy{rules="offload op=exp min-bytes=1048576"}'

!one = !torch.vtensor<[4],f32>
!two = !torch.vtensor<[8],f32>

// expected-error @below {{bwd-apply-save-policy: 'func.func' op: the rule 'offload op=exp min-bytes=1048576' matches no value of the forward; the largest that it is about has 16 bytes: say min_bytes=16 or less}}
func.func @joint(%x: !one {bwd.role = "input", bwd.name = "x"}, %y: !two {bwd.role = "input", bwd.name = "y"}, %t: !one {bwd.role = "tangent", bwd.name = "t"})
    -> (!one {bwd.role = "output", bwd.name = "out"}, !two {bwd.role = "output", bwd.name = "out_1"}, !one {bwd.role = "grad", bwd.name = "grad.x"}) {
  %out = torch.aten.exp %x : !one -> !one
  %other = torch.aten.sin %y : !two -> !two
  %grad = torch.aten.mul.Tensor %t, %out : !one, !one -> !one
  return %out, %other, %grad : !one, !two, !one
}
