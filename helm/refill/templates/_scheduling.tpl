{{/* On which nodes may pods be, and how far apart? */}}

{{/* Of the pods of the cache, and of that of `helm test`: both run on the same nodes, and find the same names. */}}
{{- define "refill.placing" -}}
{{- $placing := dict -}}
{{- range $name := list "schedulerName" "runtimeClassName" "dnsPolicy" "dnsConfig" "hostAliases" "nodeSelector" "tolerations" -}}
{{- with get $.Values $name -}}
{{- $_ := set $placing $name . -}}
{{- end -}}
{{- end -}}
{{- with include "refill.imagePullSecrets" . -}}
{{- $_ := set $placing "imagePullSecrets" (fromYamlArray .) -}}
{{- end -}}
{{- if $placing -}}
{{ toYaml $placing }}
{{- end -}}
{{- end }}

{{- define "refill.affinity" -}}
{{- $affinity := deepCopy (.Values.affinity | default dict) -}}
{{- if and (ne .Values.podAntiAffinity "none") (not (hasKey $affinity "podAntiAffinity")) -}}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" (include "refill.podSelector" . | fromYaml)) -}}
{{- if eq .Values.podAntiAffinity "required" -}}
{{- $_ := set $affinity "podAntiAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term)) -}}
{{- else -}}
{{- $preferred := list (dict "weight" 100 "podAffinityTerm" $term) -}}
{{- $_ := set $affinity "podAntiAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" $preferred) -}}
{{- end -}}
{{- end -}}
{{- if $affinity -}}
{{ toYaml $affinity }}
{{- end -}}
{{- end }}

{{- define "refill.topologySpread" -}}
{{- $constraints := list -}}
{{- $selector := dict "matchLabels" (include "refill.podSelector" . | fromYaml) -}}
{{- range .Values.topologySpreadConstraints -}}
{{- $constraints = append $constraints (ternary . (set (deepCopy .) "labelSelector" $selector) (hasKey . "labelSelector")) -}}
{{- end -}}
{{- if $constraints -}}
{{ toYaml $constraints }}
{{- end -}}
{{- end }}
