//! Macros that turn a row of the table into an operator: its loops, its CUDA kernels, its record and its documentation.
//!
//! The tokens of a formula are a Rust expression that calls functions of [`words`](super::words). The same tokens as
//! text are a C++ expression, because `kernels/cuda/pointwise.cuh` defines functions of the same names. `of(0.5)` converts a
//! constant to the element type of the computation.

/// Defines functions that several formulas use, in both languages.
macro_rules! functions {
    (
        constants { $($(#[$const_doc:meta])* $const:ident = $number:expr;)* }
        $($(#[$doc:meta])* fn $name:ident($($x:ident),+) $([$($v:ident = $e:expr),+])? = $value:expr;)*
    ) => {
        $($(#[$const_doc])* pub(super) const $const: f64 = $number;)*
        $(
            $(#[$doc])*
            #[inline(always)]
            pub(super) fn $name<A: Real>($($x: A),+) -> A {
                $($(let $v = $e;)+)?
                $value
            }
        )*
        /// The number of operations of each function.
        pub(super) const FUNCTION_FLOPS: KnownFlops =
            &[$((stringify!($name), flops!([$($($e),+)?], $value, &[]))),*];
        /// The functions as CUDA source.
        pub(super) const FUNCTIONS: &str = concat!(
            "#include \"pointwise.cuh\"\nstruct Functions : Words {\n",
            $("static constexpr f64 ", stringify!($const), " = ", stringify!($number), ";\n",)*
            $(cuda_function!(stringify!($name), "", ($($x),+), [$($($v = $e),+)?], $value),)*
            "};\n"
        );
    };
}

/// The CUDA source of a member function.
macro_rules! cuda_function {
    ($name:expr, $more:expr, ($first:ident $(, $x:ident)*), [$($v:ident = $e:expr),*], $value:expr) => {
        concat!(
            "template <class A> static DEVICE auto ", $name, "(", $more, "A ", stringify!($first),
            $(", A ", stringify!($x),)*
            ") {\n  [[maybe_unused]] const auto of = [](f64 c) { return Constant<A>::of(c); };\n",
            $("  const auto ", stringify!($v), " = ", stringify!($e), ";\n",)*
            "  return ", stringify!($value), ";\n}\n"
        )
    };
}

/// The number of operations of a formula.
macro_rules! flops {
    ([$($e:expr),*], $value:expr, $known:expr) => {
        operations(concat!($(stringify!($e), "\n",)* stringify!($value)), $known)
    };
}

/// The number of operands.
macro_rules! arity {
    ($x:ident) => {
        1
    };
    ($x:ident, $y:ident) => {
        2
    };
    ($x:ident, $y:ident, $z:ident) => {
        3
    };
}

/// The parameters of a CUDA formula that are constants.
macro_rules! cuda_constants {
    () => {
        "f64, f64, "
    };
    ($s:ident) => {
        concat!("f64 ", stringify!($s), ", f64, ")
    };
    ($s:ident, $t:ident) => {
        concat!("f64 ", stringify!($s), ", f64 ", stringify!($t), ", ")
    };
}

/// Gives a type the loops of a formula (`LOOPS`) and its CUDA kernels (`FORMULA`).
macro_rules! function {
    (
        $Type:ident $name:ident: $class:ident,
        ($($x:ident),+) ($($s:ident),*) [$($v:ident = $e:expr),*] $value:expr
    ) => {
        function!(@loops $Type $class, ($($x),+) ($($s),*) [$($v = $e),*] $value);

        impl $Type {
            /// The formula's number of operations per element.
            pub(in crate::ops::pointwise) const FLOPS: u64 = flops!([$($e),*], $value, FUNCTION_FLOPS);

            /// The formula's CUDA kernels.
            pub(in crate::ops::pointwise) const FORMULA: cuda::FormulaKernels = cuda::formula!(
                in cuda::KernelSource {
                    name: stringify!($name),
                    parts: &[
                        FUNCTIONS,
                        function!(@source "ALIKE_" $name $class, ($($x),+) ($($s),*) [$($v = $e),*] $value),
                    ],
                },
                stringify!($name)
            );

            /// The formula's CUDA kernels for lists of operands.
            #[allow(dead_code)]
            pub(in crate::ops::pointwise) const LIST: cuda::ListKernels = cuda::ListKernels {
                source: cuda::KernelSource {
                    name: concat!(stringify!($name), "_list"),
                    parts: &[
                        FUNCTIONS,
                        function!(@source "LIST_" $name $class, ($($x),+) ($($s),*) [$($v = $e),*] $value),
                    ],
                },
                entry: concat!(stringify!($name), "_list"),
            };
        }
    };
    (@source $calls:literal $name:ident $class:ident, ($($x:ident),+) ($($s:ident),*) [$($v:ident = $e:expr),*] $value:expr) => {
        concat!(
            "struct ", stringify!($name), "_formula : Functions", function!(@base $class), " {\n",
            cuda_function!("at", cuda_constants!($($s),*), ($($x),+), [$($v = $e),*], $value),
            function!(@short $class, cuda_function!("at", cuda_constants!($($s),*), ($($x),+), [$($v = $e),*], $value)),
            "};\n",
            function!(@each $class),
            "(", $calls, arity!($($x),+), ", ", stringify!($name), ")\n"
        )
    };
    (@constant $Type:ident, $loops:expr) => {
        impl $Type {
            /// The formula's loops.
            pub(in crate::ops) const LOOPS: Loops = $loops;
        }
    };
    (@loops $Type:ident floats, ($($x:ident),+) ($($s:ident),*) [$($v:ident = $e:expr),*] $value:expr) => {
        function!(@loops $Type functions, ($($x),+) ($($s),*) [$($v = $e),*] $value);

        function!(@constant $Type, Loops::floats::<$Type, { arity!($($x),+) }>());
    };
    (@loops $Type:ident functions, ($($x:ident),+) ($($s:ident),*) [$($v:ident = $e:expr),*] $value:expr) => {
        impl Function<{ arity!($($x),+) }> for $Type {
            #[inline(always)]
            fn at<A: Real>([$($s,)* ..]: Constants, [$($x),+]: [A; arity!($($x),+)]) -> A {
                $(let $v = $e;)*
                $value
            }
        }
    };
    (@loops $Type:ident two_pass_floats, ($($x:ident),+) () [$b:ident = $bound:expr, $first:ident = $part:expr $(, $v:ident = $e:expr)*] $value:expr) => {
        function!(@loops $Type functions, ($($x),+) () [$b = $bound, $first = $part $(, $v = $e)*] $value);

        impl TwoPasses<{ arity!($($x),+) }> for $Type {
            #[inline(always)]
            #[allow(unused_variables)]
            fn first<A: Real>([$($x),+]: [A; arity!($($x),+)]) -> A {
                let $b = $bound;
                $part
            }

            #[inline(always)]
            fn second<A: Real>([$($x),+]: [A; arity!($($x),+)], $first: A) -> A {
                let $b = $bound;
                $(let $v = $e;)*
                $value
            }
        }

        function!(@constant $Type, Loops::floats_in_two_passes::<$Type, { arity!($($x),+) }>());
    };
    (@loops $Type:ident wide_floats, ($($x:ident),+) ($($s:ident),*) [$($v:ident = $e:expr),*] $value:expr) => {
        function!(@forms $Type [at words] ($($x),+) ($($s),*) [$($v = $e),*] $value);

        function!(@constant $Type, Loops::wide::<$Type, { arity!($($x),+) }>());
    };
    (@loops $Type:ident short_floats, ($($x:ident),+) ($($s:ident),*) [$($v:ident = $e:expr),*] $value:expr) => {
        function!(@forms $Type [at words, at_short words::short] ($($x),+) ($($s),*) [$($v = $e),*] $value);

        function!(@constant $Type, Loops::wide_with_short::<$Type, { arity!($($x),+) }>());
    };
    (@loops $Type:ident rare_functions, ($($x:ident),+) ($($s:ident),*) [$($v:ident = $e:expr),*] $value:expr) => {
        impl Function<{ arity!($($x),+) }> for $Type {
            #[inline(always)]
            fn at<A: Real>([$($s,)* ..]: Constants, [$($x),+]: [A; arity!($($x),+)]) -> A {
                use crate::ops::pointwise::words::near::*;
                $(let $v = $e;)*
                $value
            }
            fn at_rare<A: Real>([$($s,)* ..]: Constants, [$($x),+]: [A; arity!($($x),+)]) -> A {
                use crate::ops::pointwise::words::far::*;
                $(let $v = $e;)*
                $value
            }
        }
    };
    (@loops $Type:ident rare_floats, ($($x:ident),+) ($($s:ident),*) [$($v:ident = $e:expr),*] $value:expr) => {
        function!(@loops $Type rare_functions, ($($x),+) ($($s),*) [$($v = $e),*] $value);

        function!(@constant $Type, Loops::floats_with_rare::<$Type, { arity!($($x),+) }>());
    };
    (@loops $Type:ident rare_numbers, ($($x:ident),+) ($($s:ident),*) [$($v:ident = $e:expr),*] $value:expr) => {
        function!(@loops $Type rare_functions, ($($x),+) ($($s),*) [$($v = $e),*] $value);
        function!(@loops $Type num_functions, ($($x),+) ($($s),*) [$($v = $e),*] $value);

        function!(@constant $Type, Loops::numbers_with_rare::<$Type, { arity!($($x),+) }>());
    };
    (@loops $Type:ident far_floats, ($($x:ident),+) ($($s:ident),*) [$($v:ident = $e:expr),*] $value:expr) => {
        function!(@forms $Type [at words::near, at_rare words::far] ($($x),+) ($($s),*) [$($v = $e),*] $value);

        function!(@constant $Type, Loops::wide_with_rare::<$Type, { arity!($($x),+) }>());
    };
    (@forms $Type:ident [$($at:ident $($words:ident)::+),+] $xs:tt $s:tt $local:tt $value:expr) => {
        impl WideFunction<{ function!(@arity $xs) }> for $Type {
            $(function!(@form $at $($words)::+, $xs $s $local $value);)+
        }
    };
    (@arity ($($x:ident),+)) => {
        arity!($($x),+)
    };
    (
        @form $at:ident $($words:ident)::+,
        ($($x:ident),+) ($($s:ident),*) [$($v:ident = $e:expr),*] $value:expr
    ) => {
        #[inline(always)]
        fn $at([$($s,)* ..]: Constants, [$($x),+]: [f64; arity!($($x),+)]) -> f64 {
            use crate::ops::pointwise::$($words)::+::*;
            $(let $v = $e;)*
            $value
        }
    };
    (@loops $Type:ident num_functions, ($($x:ident),+) ($($s:ident),*) [$($v:ident = $e:expr),*] $value:expr) => {
        impl NumFunction<{ arity!($($x),+) }> for $Type {
            #[inline(always)]
            fn at<A: Num>([$($s,)* ..]: Constants, [$($x),+]: [A; arity!($($x),+)]) -> A {
                $(let $v = $e;)*
                $value
            }
        }
    };
    (@loops $Type:ident numbers, ($($x:ident),+) ($($s:ident),*) [$($v:ident = $e:expr),*] $value:expr) => {
        function!(@loops $Type num_functions, ($($x),+) ($($s),*) [$($v = $e),*] $value);

        function!(@constant $Type, Loops::numbers::<$Type, { arity!($($x),+) }>());
    };
    (@loops $Type:ident $class:ident, ($($x:ident),+) () [$($v:ident = $e:expr),*] $value:expr) => {
        impl BitFunction<{ arity!($($x),+) }> for $Type {
            #[inline(always)]
            fn at<A: BitNum>([$($x),+]: [A; arity!($($x),+)]) -> A {
                $(let $v = $e;)*
                $value
            }
        }

        function!(@constant $Type, Loops::$class::<$Type, { arity!($($x),+) }>());
    };
    (@base wide_floats) => {
        ", ComputedInF64"
    };
    (@base far_floats) => {
        ", ComputedInF64"
    };
    (@base short_floats) => {
        ", ComputedInF64"
    };
    (@base $class:ident) => {
        ""
    };
    (@short short_floats, $at:expr) => {
        concat!("static constexpr bool SHORT = true;\nstruct Short : ShortWords<Functions> {\n", $at, "};\n")
    };
    (@short $class:ident, $at:expr) => {
        ""
    };
    (@each integers) => {
        "EACH_INTEGER"
    };
    (@each bits) => {
        "EACH_BITS"
    };
    (@each numbers) => {
        "EACH_NUMBER"
    };
    (@each rare_numbers) => {
        "EACH_NUMBER"
    };
    (@each $floats:ident) => {
        "EACH_FLOAT"
    };
}

/// Implements the operators of the table: for each row its loops, kernels, [`Pointwise`](super::Pointwise) record and
/// samples.
macro_rules! records {
    ($(
        $(#[$doc:meta])*
        $Type:ident $name:ident($($x:ident),+ $(; $($s:ident),+)?) $(as $verb:literal)?
            $([$($v:ident = $e:expr),+])? = $value:expr,
        for $class:ident, $algebra:ident $why:literal $(and |$ins:ident $(, $constant:ident)*| $rows:expr)?,
        gradient |$d:ident, $out:ident| { $($of:ident => $g:tt),+ },
        samples [$($($fill:ident)+),*] $(rounded $rounded:literal)? $(not_smooth [$($($not_smooth:ident)+),*])?,
        example $($operand:tt),+ $(; $($number:literal),+)? => $want:tt;
    )*) => {
        $(
            function!($Type $name: $class, ($($x),+) ($($($s),+)?) [$($($v = $e),+)?] $value);

            impl Pointwise for $Type {
                const NAME: &'static str = verb!($name $($verb)?);
                const ARITY: usize = arity!($($x),+);

                fn algebra(&self) -> Algebra {
                    Algebra::$algebra
                }

                fn dtype(&self, ins: &[Meta]) -> Result<DType> {
                    dtype_of_formula($class, Self::NAME, ins, &constants!(self $($($s)+)?))
                }

                fn kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
                    cpu::compute(Self::NAME, &Self::LOOPS, constants!(self $($($s)+)?), ins)
                }

                fn cuda_kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
                    cuda::map(Self::FORMULA, ins, &constants!(self $($($s)+)?))
                }

                fn flops(&self) -> u64 {
                    Self::FLOPS
                }

                #[allow(unused_variables)]
                fn derivative(&self, g: &mut Vjp) -> Result<()> {
                    let writer = GradientWriter::new(g);
                    let [$($x),+] = writer.operands();
                    let ($d, $out) = (writer.grad(), writer.output());
                    $($(let $s = self.$s.0;)+)?
                    $(gradient!(writer, $of, $g);)+
                    writer.finish()
                }

                $(#[allow(unused_variables)]
                fn more_rows(&self, $ins: &[Meta]) -> Vec<Row> {
                    $(let $constant = self.$constant.0;)*
                    $rows
                })?
            }
        )*

        /// The samples of every row.
        pub(super) fn row_samples() -> Vec<Sample> {
            let mut all = Vec::new();
            $(
                let op = sample_of!($Type $($($s)+)?);
                let smooth: &[&[InputFill]] = &[$(&[$(InputFill::$fill),+]),*];
                let not_smooth: &[&[InputFill]] = &[$($(&[$(InputFill::$not_smooth),+]),*)?];
                let rounded: &[usize] = &[$($rounded)?];
                let class = stringify!($class);
                add_samples(&mut all, &op, smooth, not_smooth, rounded.first().copied().unwrap_or(0), class);
            )*
            all
        }

        /// The operators of all rows; several for a row with a constant.
        pub(super) fn row_operators() -> Vec<Arc<dyn Op>> {
            let mut all: Vec<Arc<dyn Op>> = Vec::new();
            $(all.extend(sample_of!($Type $($($s)+)?).map(|op| Arc::new(op) as Arc<dyn Op>));)*
            all
        }

        /// The CUDA sources of every row.
        pub(super) const ROW_SOURCES: &[cuda::KernelSource] = &[$($Type::FORMULA.source),*];
    };
}

/// Defines the type of each row, with its documentation. `method` adds a link to the method of `DTensor`.
macro_rules! record_types {
    ($kind:ident: $(
        $(#[$doc:meta])*
        $Type:ident $name:ident($($x:ident),+ $(; $($s:ident),+)?) $(as $verb:literal)?
            $([$($given:tt)*])? = $value:expr,
        for $class:ident, $algebra:ident $why:literal $(and |$($ins:ident),+| $rows:expr)?,
        gradient |$d:ident, $out:ident| { $($of:ident => $g:tt),+ },
        samples [$($smooth:tt)*] $(rounded $rounded:literal)? $(not_smooth [$($not_smooth:tt)*])?,
        example $($operand:tt),+ $(; $($number:literal),+)? => $want:tt;
    )*) => {
        $(record_type!(
            $(#[$doc])*
            #[doc = ""]
            #[doc = method_link!($kind $name)]
            #[doc = concat!("Partial operands: [`", stringify!($algebra), "`](Algebra::", stringify!($algebra), "). ", $why)]
            #[doc = concat!(
                "\n```\nuse isoshard::{ops::{", stringify!($Type), ", eval_whole}, tensor::Tensor};\n",
                $("let ", stringify!($x), " = ", tensor_example!($operand), "?;\n",)+
                example_check!(
                    concat!(
                        "eval_whole(&", stringify!($Type), $("::by", stringify!(($($number),+)),)? ", &",
                        stringify!([$($x),+]), ")?[0]"
                    ),
                    $want
                ),
                "# Ok::<(), isoshard::Error>(())\n```"
            )]
            $Type $($($s)+)?
        );)*
    };
}

/// The sentence that links an operator to its method.
macro_rules! method_link {
    (method $name:ident) => {
        concat!(
            "Applied by [`DTensor::",
            stringify!($name),
            "`](crate::dtensor::DTensor::",
            stringify!($name),
            ").\n"
        )
    };
    (derivative $name:ident) => {
        "Applied in backward passes; `DTensor` has no method for it.\n"
    };
}

/// The line of an example that checks a tensor's values: an array exactly, a string to three digits after the point.
macro_rules! example_check {
    ($tensor:expr, [$a:literal, $b:literal]) => {
        concat!("assert_eq!(", $tensor, ".to_f64_vec(), [", stringify!($a), ", ", stringify!($b), "]);\n")
    };
    ($tensor:expr, $text:literal) => {
        concat!("assert_eq!(format!(\"{:.3?}\", ", $tensor, ".to_f64_vec()), ", stringify!($text), ");\n")
    };
}
pub(crate) use example_check;

/// The expression of an example that creates a tensor of two elements.
macro_rules! tensor_example {
    ([$a:literal, $b:literal]) => {
        concat!("Tensor::from_vec(vec![", stringify!($a), ", ", stringify!($b), "], [2])")
    };
}
pub(crate) use tensor_example;

/// A row's type, with its constant if it has one.
macro_rules! record_type {
    ($(#[$doc:meta])* $Type:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct $Type;
    };
    ($(#[$doc:meta])* $Type:ident $($s:ident)+) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct $Type {
            $(
                /// A constant of the formula.
                pub $s: Bits,
            )+
        }

        impl $Type {
            /// Creates the operator with these constants.
            pub fn by($($s: f64),+) -> $Type {
                $Type { $($s: Bits($s)),+ }
            }
        }
    };
}

/// The operator's name: the method's, unless the row gives another.
macro_rules! verb {
    ($name:ident) => {
        stringify!($name)
    };
    ($name:ident $verb:literal) => {
        $verb
    };
}

/// The operator's constants, 0 for those that it does not have.
macro_rules! constants {
    ($self:ident) => {
        [0.0; 2]
    };
    ($self:ident $s:ident) => {
        [$self.$s.0, 0.0]
    };
    ($self:ident $s:ident $t:ident) => {
        [$self.$s.0, $self.$t.0]
    };
}

/// The operators of a row's samples: several for a row with a constant.
macro_rules! sample_of {
    ($Type:ident) => {
        [$Type]
    };
    ($Type:ident $s:ident) => {
        [1.5, -3.0, 2.0, -1.0, 1.0 / 3.0, -3e300, f64::NAN].map($Type::by)
    };
    ($Type:ident $s:ident $t:ident) => {
        [(-1.5, 2.0), (0.0, 3.0), (-3.0, -1.0), (f64::NEG_INFINITY, 1.0)].map(|(s, t)| $Type::by(s, t))
    };
}

/// Sets an operand's gradient, or states why it has none.
macro_rules! gradient {
    ($writer:ident, $of:ident, ($value:expr)) => {
        if $writer.needs($of) {
            let gradient = $value;
            $writer.set($of, gradient);
        }
    };
    ($writer:ident, $of:ident, $why:literal) => {
        $writer.none($of, $why);
    };
}

/// Makes the operators of a table: their types, their records, and the steps of derivatives.
macro_rules! make_operators {
    (methods { $($method:tt)* } derivatives { $($derivative:tt)* }) => {
        record_types! { method: $($method)* }
        record_types! { derivative: $($derivative)* }
        records! { $($method)* $($derivative)* }
        signatures! { expr_methods: $($method)* $($derivative)* }
    };
}

/// The rows as methods of an expression in a derivative.
macro_rules! expr_methods {
    ($([$(#[$doc:meta])*] $Type:ident $name:ident($x:ident $(, $y:ident)*) ($($s:ident),*);)*) => {
        #[allow(dead_code, clippy::should_implement_trait)]
        impl<'t> GradientExpr<'t> {
            $(#[doc = concat!("Adds a step of [`", stringify!($Type), "`].")]
            pub fn $name(self $(, $y: GradientExpr<'t>)* $(, $s: f64)*) -> GradientExpr<'t> {
                self.then(operator!($Type $($s)*), &[$($y),*])
            })*
        }
    };
}
macro_rules! operator {
    ($Type:ident) => {
        $Type
    };
    ($Type:ident $($s:ident)+) => {
        $Type::by($($s),+)
    };
}

/// Passes the documentation, type, method, operands and constant of each row to another macro. The documentation ends
/// with an example that calls the method of `DTensor`.
macro_rules! signatures {
    ($then:ident: $(
        $(#[$doc:meta])*
        $Type:ident $name:ident($x:ident $(, $y:ident)* $(; $($s:ident),+)?) $(as $verb:literal)?
            $([$($given:tt)*])? = $value:expr,
        for $class:ident, $algebra:ident $why:literal $(and |$($ins:ident),+| $rows:expr)?,
        gradient |$d:ident, $out:ident| { $($of:ident => $g:tt),+ },
        samples [$($smooth:tt)*] $(rounded $rounded:literal)? $(not_smooth [$($not_smooth:tt)*])?,
        example $first:tt $(, $operand:tt)* $(; $($number:literal),+)? => $want:tt;
    )*) => {
        $then! { $(
            [
                $(#[$doc])*
                #[doc = concat!(
                    "\n```\n# use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};\n",
                    "# spmd(2, |rank| {\n# let mesh = DeviceMesh::new(&rank, &[(\"dp\", 2)])?;\n",
                    $crate::ops::distribute_example!($x, $first),
                    $($crate::ops::distribute_example!($y, $operand),)*
                    $crate::ops::example_check!(
                        concat!(
                            stringify!($x), ".", stringify!($name), "(", $("&", stringify!($y), ", ",)*
                            $($(stringify!($number), ", ",)+)? ")?.full_tensor()?"
                        ),
                        $want
                    ),
                    "# Ok(())\n# })?;\n# Ok::<(), isoshard::Error>(())\n```"
                )]
            ]
            $Type $name($x $(, $y)*) ($($($s),+)?);
        )* }
    };
}
pub(crate) use signatures;

/// The line of an example that creates a sharded operand.
macro_rules! distribute_example {
    ($x:ident, $values:tt) => {
        concat!(
            "let ",
            stringify!($x),
            " = DTensor::distribute(&mesh, &",
            $crate::ops::tensor_example!($values),
            "?, \"(S0)\")?;\n"
        )
    };
}
pub(crate) use distribute_example;
