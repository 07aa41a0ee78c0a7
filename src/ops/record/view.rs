//! The methods that all views have in common.

/// The methods of an operator whose results are views, beside `infer`, `rows`, `eval` and `vjp`: [`Tensor`] makes views on
/// every device alike, and they are free.
///
/// [`Tensor`]: crate::tensor::Tensor
macro_rules! view_methods {
    () => {
        fn cuda(
            &self,
            ins: &mut [crate::tensor::Tensor],
            at: &crate::ops::Windows,
        ) -> Result<crate::ops::Tensors> {
            self.eval(ins, at)
        }

        fn is_view(&self) -> bool {
            true
        }

        fn work(&self, _: &[crate::ops::Meta], _: &[crate::ops::Meta]) -> crate::ops::Work {
            crate::ops::Work::view()
        }
    };
}
pub(in crate::ops) use view_methods;
